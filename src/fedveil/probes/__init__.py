"""Methods whose clients only run the model forward and answer with what they saw of its loss."""
