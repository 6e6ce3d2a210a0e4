"""The sides of a comparison, each run in its own process: ours, transformers, llama.cpp. Started by `benchmarks.side`."""
