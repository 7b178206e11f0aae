"""Methods whose clients send their weight update, raw or in another form."""
