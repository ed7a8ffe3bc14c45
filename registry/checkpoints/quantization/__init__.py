"""What a checkpoint's config.json says about quantized weights: which modules, and how stored."""
