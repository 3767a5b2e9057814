"""The loop that packs documents into samples, compiled by Numba."""

from typing import no_type_check

from numba import njit


@njit(nogil=True)
@no_type_check
def next_fit(ends, row, begin, seq_len, out):
    """Write the first token of each further sample to `out`; return the last of them, the open document's, and a count.

    Args:
      ends: int64[documents], the token after each document.
      row: first token of the sample that is being filled.
      begin: first token of the next document.
      out: int64 array for the starts.
    """
    count = 0
    for end in ends:
        if end - row > seq_len + 1 and begin > row:
            row = begin
            out[count] = row
            count += 1
        while end - row > seq_len + 1:
            row += seq_len
            out[count] = row
            count += 1
        begin = end
    return row, begin, count
