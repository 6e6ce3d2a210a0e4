"""What can be certified: servers, transformers and functions. `module:class` names a subject of your own."""
