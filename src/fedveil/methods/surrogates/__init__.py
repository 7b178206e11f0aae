"""Methods whose clients send samples that imitate their loss, on which the server trains."""
