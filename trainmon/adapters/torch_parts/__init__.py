"""What adapters of hosts that train torch models share: parameter lists, optimizer views, hooks inside the model."""
