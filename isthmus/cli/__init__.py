"""The commands, one function each. No other room prints."""
