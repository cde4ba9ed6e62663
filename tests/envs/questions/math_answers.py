"""120 answers as models write them: whether our grader takes them, whether slime's does, and why
they differ."""

_TABLE = r"""
40 | 40° | right | wrong | slime's grader does not know the sign
40 | m∠A = 40° | right | wrong | slime's grader does not know the sign
40 | m\angle A = 40^\circ | right | wrong | slime's grader does not know names of angles
50 | 50\degree | right | right
50 | 50^o | right | wrong | slime's grader reads o as a variable
50 | 50^{\text{o}} | right | wrong | slime's grader reads o as a variable
50 | 50^{\circ} | right | right
27 | 27 degrees | right | right
40° | 40 | right | wrong | slime's grader does not know the sign
40 | 41° | wrong | wrong
40° | 40 cm | wrong | wrong
40, 50 | 40°, 50° | right | wrong | slime's grader does not know the sign
0.5 | \sin 30^\circ | right | wrong | slime's grader drops the degree sign, so it takes the sine of 30 radians
3 \sqrt { 3 } | 3√3 | right | wrong | slime's grader does not know the sign
3\sqrt{3} | 3sqrt(3) | right | right
3\sqrt{3} | 3*sqrt(3) | right | right
3\sqrt{3} | \sqrt{27} | right | right
3\sqrt{3} | 3sqrt3 | right | wrong | slime's grader reads sqrt3 as a name
\frac{\sqrt{3}}{2} | √3/2 | right | wrong | slime's grader does not know the sign
\frac{\sqrt{3}}{2} | \frac{\sqrt3}{2} | right | right
\sqrt{x+1} | √(x+1) | right | wrong | slime's grader does not know the sign
2 | ∛8 | right | wrong | slime's grader does not know the sign
2 | \sqrt[3]{8} | right | wrong | slime's grader wants an integer reference to be met literally
2 | \sqrt{4} | right | wrong | slime's grader wants an integer reference to be met literally
3\sqrt{3} | 3√2 | wrong | wrong
\frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2} | right | right
3\sqrt{3} | 5.196 | wrong | wrong
3\sqrt{3} | 5.196152 | right | wrong | slime's grader compares exactly, ours to six decimals
3\sqrt{2} | \sqrt{18} | right | right
\sqrt{10} | 10 | wrong | wrong
13 | 13 cm^2 | right | right
13 | 13 in² | right | wrong | slime's grader does not know the unit
13 | 13 cm | right | right
13 | 13\text{ cm} | right | right
13 | 13 \text{ cm}^2 | right | right
13 | 13\,\mathrm{cm}^{2} | right | wrong | slime's grader does not know this spelling of the unit
13 | 13 square inches | right | wrong | slime's grader does not know the unit
13 | 13 sq. ft. | right | wrong | slime's grader does not know the unit
13 | 13 units | right | wrong | slime's grader does not know the unit
13 | 13 m | right | wrong | slime's grader does not know the unit
13 | 13 m/s | right | wrong | slime's grader does not know the unit
60 | 60 km/h | right | wrong | slime's grader does not know the unit
13 cm | 13 | right | right
13 cm | 13 m | wrong | wrong
13 cm^2 | 13 cm | wrong | right | slime's grader drops units without comparing them
13 m | 1300 cm | wrong | wrong
54.4 | 54.4 \text{ cm} | right | right
5 | \$5 | right | right
13 | 14 cm | wrong | wrong
12\pi | 12\pi \text{ cm}^2 | right | right
13 | ≈13 | right | wrong | slime's grader does not know the sign
13 | \approx 13 | right | wrong | slime's grader does not know the sign
13 | x ≈ 13 | right | wrong | slime's grader does not know the sign
27 | x = 27 | right | right
27 | x=27 | right | right
27 | 27. | right | right
27 | = 27 | right | right
27 | $27$ | right | right
13 | ≈14 | wrong | wrong
4.5 | 4 1/2 | right | right
\frac{9}{2} | 4\frac{1}{2} | right | right
4.5 | 4½ | right | wrong | slime's grader does not know the sign
-4.5 | -4 1/2 | right | wrong | slime's grader reads -4 + 1/2
4.5 | 4 and 1/2 | right | wrong | slime's grader reads a list
\frac{9}{2} | 4.5 | right | right
\frac{9}{2} | 9/2 | right | right
\frac{9}{2} | 18/4 | right | wrong | slime's grader wants fractions reduced
\frac{1}{2} | 0.5 | right | right
\frac12 | \frac{1}{2} | right | right
\frac{1}{2} | \dfrac{1}{2} | right | right
1/3 | 0.333 | wrong | wrong
1/3 | 0.3333333 | right | wrong | slime's grader compares exactly, ours to six decimals
27 | 54/2 | right | wrong | slime's grader wants an integer reference to be met literally
27 | 3^3 | right | wrong | slime's grader wants an integer reference to be met literally
27 | 27.0 | right | right
4.5 | 41/2 | wrong | wrong
5 | 2 3 | wrong | wrong
25 | 25% | wrong | right | slime's grader drops the percent sign
25 | 25\% | wrong | right | slime's grader drops the percent sign
0.25 | 25% | right | wrong | slime's grader drops the percent sign
25% | 25 | right | right
25% | 25\% | right | right
25% | 0.25 | right | wrong | slime's grader drops the percent sign
25% | 1/4 | right | wrong | slime's grader drops the percent sign
25% | 26% | wrong | wrong
2500 | 25% | wrong | wrong
1,000 | 1000 | right | right
1000 | 1,000 | right | right
1000 | 1{,}000 | right | right
1000 | 1\,000 | right | wrong | slime's grader does not know this separator
0.5 | .5 | right | right
-3 | −3 | right | wrong | slime's grader does not know the sign
-3 | 3 | wrong | wrong
10 | 1e1 | right | right
3000000 | 3 million | wrong | wrong
10 | 10^{1} | right | wrong | slime's grader wants an integer reference to be met literally
12 | 12\pi | wrong | wrong
12π | 12\pi | right | wrong | slime's grader does not know the sign
2\pi | 6.2832 | wrong | wrong
2\pi | 2pi | right | right
x^2+1 | 1+x^2 | right | right
x^2+1 | x^2+2 | wrong | wrong
2(x+1) | 2x+2 | right | right
x=3 | 3 | right | right
13m | 13 | right | wrong | math-verify reads a letter after a number as a unit
5x+3 | 5x+4 | wrong | wrong
2\frac{9}{2} | 9 | wrong | wrong
(1,2) | (1, 2) | right | right
(1,2) | (2,1) | wrong | wrong
(1,2) | [1,2] | wrong | wrong
\{1,2\} | \{2,1\} | right | wrong | slime's grader compares sets in order
27 | 27, 28 | wrong | wrong
27 | 27 or 28 | wrong | wrong
27 | 27\text{ and }28 | wrong | right | slime's grader cuts the answer at \text
27 | not 27 | wrong | wrong
A | A | right | right
A | a | right | right
A | \text{A} | right | right
yes | no | wrong | wrong
27 | twenty-seven | wrong | wrong
"""
"""Reference, answer, our verdict, slime's, and the reason where they differ."""


def _read(line: str) -> tuple[str, str, bool, bool, *tuple[str, ...]]:
    reference, answer, ours, slimes, *why = line.split(" | ")
    return reference, answer, ours == "right", slimes == "right", *why


ANSWERS = [_read(line) for line in _TABLE.strip().splitlines()]
