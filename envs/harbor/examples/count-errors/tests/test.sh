#!/bin/bash
# The score is 1 if the report is right, otherwise 0.
if python3 /tests/check.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
