#!/usr/bin/env bash
# One write, because the two ends of a pipe write at the same time.
printf '%s\0' "${0##*/}" "$@" $'\x1e' >>"$CALLS"
case "$*" in
  *"value(address)"* | *jsonpath*) echo 10.1.2.3 ;;
  *"value(state.state)"*) echo "${STATE:-ACTIVE}" ;;
  *networkEndpoints*) echo "10.0.0.1;10.0.0.2" ;;
  *" describe "* | *" get -f "*)
    if [ "$THERE" = nothing ]; then echo "ERROR: it was not found" >&2; exit 1; fi
    if [ "$THERE" = unknown ]; then echo "ERROR: your login has expired" >&2; exit 1; fi
    ;;
  "certs certs --learners "*)
    mkdir -p certs
    touch certs/ca.pem certs/token
    for name in syncer ${4//,/ }; do touch "certs/$name.pem" "certs/$name.key"; done
    ;;
  *" -f -") cat >/dev/null ;;
  *--data-file=-*) tar -tz ;;
esac
if [ -n "${FAIL:-}" ] && [[ "$*" == *"$FAIL"* ]]; then echo "no capacity" >&2; exit 3; fi
