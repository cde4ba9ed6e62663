#!/bin/bash
cp /solution/interest.py /app/interest.py
