"""What is trained: Hugging Face models cut into stages of contiguous layers.

The way through the room: `blueprint` (which model, which head) → `assembly` (one stage with its weights) →
`stage` (forward) → `export` (parts, and the model joined from them). Beside it: `bottleneck` (a trained
boundary between two stages) and `freeze` (layers that do not learn).
"""
