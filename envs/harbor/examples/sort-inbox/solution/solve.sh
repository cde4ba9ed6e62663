#!/bin/bash
set -e
mkdir -p /data/sorted/invoice /data/sorted/letter /data/sorted/other
for file in /data/inbox/*; do
  kind=$(head -n 1 "$file" | tr 'A-Z' 'a-z' | sed -n 's/^type: \(invoice\|letter\)$/\1/p')
  mv "$file" "/data/sorted/${kind:-other}/"
done
