"""Parts of tensors: which box a rank holds, exchange between ranks, safetensors files."""
