"""What the course costs and gains, measured: `python -m benchmarks`, results in results/*.json."""
