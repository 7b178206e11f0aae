"""What every method shares: messages, tasks, clients, cohorts, the loop and the ledger."""
