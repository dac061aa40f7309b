"""The front door: one object that saves, resumes and stops a training loop."""
