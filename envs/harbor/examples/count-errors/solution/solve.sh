#!/bin/bash
set -e
awk '$3 == "ERROR" { count[$4]++ }
  END { for (service in count) printf "%s %d\n", service, count[service] }' /app/events.txt |
  sort | awk '
    BEGIN { printf "{" }
    { printf "%s\"%s\": %d", separator, $1, $2; separator = ", " }
    END { print "}" }' > /app/errors.json
