"""One file per family of models: from a configuration to a program."""
