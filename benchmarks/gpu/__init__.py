"""What a GPU shows of the GPU path: `python -m benchmarks.gpu`."""
