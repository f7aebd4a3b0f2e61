"""TensorRT and TensorRT-RTX: the session over an engine, the modules, and memory on the GPU."""
