"""The runtime: devices, chunk storage, managed parameters, the executor and the optimizers. It decides nothing."""
