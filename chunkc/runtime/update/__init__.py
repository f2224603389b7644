"""Update rules, their arithmetic on the host, inputs of a step, loss scales and norms."""
