"""Parts of tensors: which box a rank holds, its exchange between ranks, its place in a safetensors file."""
