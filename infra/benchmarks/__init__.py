"""The parts of `infra/bench`: inputs, the work of each row, the measuring, the report."""
