"""Sinks of events for other programs: Prometheus and OpenTelemetry."""
