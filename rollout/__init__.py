"""How turns are collected: prompt, engine, environment, samples."""
