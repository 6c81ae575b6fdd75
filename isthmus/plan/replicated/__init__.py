"""Plans in which clouds hold whole models: data parallel, and generators with a discriminator."""
