"""What localckpt costs, measured beside the limit of the machine in the same run."""
