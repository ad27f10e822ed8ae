"""What a Hugging Face model folder is: names of its weights, index and shards, config, parameters."""
