"""What lets programs that are written for other libraries run on this one."""
