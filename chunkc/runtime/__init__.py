"""The runtime, which carries out plans: devices, storage, parameters, executor and optimizers."""
