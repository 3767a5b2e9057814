"""The paper's tables beside our figures: goodput from simulations, bandwidth from formulas."""
