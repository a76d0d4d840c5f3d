"""Text from a model: at any tp and pp, from a training checkpoint or a Hugging Face folder."""
