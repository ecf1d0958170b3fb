"""State to shards (safetensors) and an index (JSON), and back."""
