"""The policy: one decoder module for the Llama, Qwen2 and Qwen3 families, and Hugging Face folders in and out."""
