"""What a training step takes from us besides the advantages: losses, whitening, alarms and expanded
images."""
