"""Methods whose clients send samples that stand in for their loss, on which the server trains."""
