"""What a model takes: shapes, parameters, arithmetic, activations, memory; on which device, in what time."""
