"""Layer 1: values and rules that reconcile and autoscale share."""
