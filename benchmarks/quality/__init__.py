"""What codecs cost in quality: data, two tasks, a queue of trainings, and the report of them."""
