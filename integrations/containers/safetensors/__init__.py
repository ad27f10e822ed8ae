"""safetensors files: header, element types, and the writer."""
