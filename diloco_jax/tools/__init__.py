"""Programs that stand around a run; nothing below imports them."""
