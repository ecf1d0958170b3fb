"""The only room that knows accelerate and transformers."""
