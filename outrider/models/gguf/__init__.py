"""Models from GGUF files: the files of llama.cpp, with weights, configuration and tokenizer in one."""
