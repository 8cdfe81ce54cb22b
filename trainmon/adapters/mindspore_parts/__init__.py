"""What adapters of hosts that train MindSpore models share: parameter lists, optimizer views, what a step returns, hooks
that are compiled with it, and a run of ``Model.train`` behind MindSpore's callback."""
