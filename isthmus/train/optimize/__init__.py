"""AdamW over all stages: moments in 32 or 8 bits, on the device or on the host."""
