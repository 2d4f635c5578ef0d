"""reward.py, math: pairs with a known verdict, hostile inputs, and the pool of workers.

The pairs are rewritten from reports against public graders, or made up in their manner.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import reward
from reward import extract_answer, math_equal, math_reward, score, usable_gold

SECRET = os.environ.setdefault("HF_TOKEN", "a secret of the host")

# prediction ✓ gold: right; prediction ✗ gold: wrong
FIRM = r"""
0.0833333333333333 ✓ \frac{1}{12}
(1,4.5) ✓ (1,\frac{9}{2})
\frac{x}{7}+\frac{2}{7} ✓ \frac{x+2}{7}
-34x-45y+20z-100=0 ✓ 34x+45y-20z+100=0
D = (0, 1.5) ✗ D = (0, 1)
\frac{1}{3 \cdot 2^{2006}} ✗ \frac{2^{2005}+1}{3 \cdot 2^{2006}}
m \geq \sqrt{2} ✓ m \in [\sqrt{2}, +\infty)
m \in [\sqrt{2}, +\infty) ✓ m \geq \sqrt{2}
y = -1/2*x + 3/4 ✓ 2x+4y-3=0
13 ✓ \text{13}
x^2/16 + y^2/12 = 1 ✗ x^2/4 + y^2/3 = 1
\left( 3, \frac{\pi}{2} \right) ✓ \left( 3, \frac{\pi}{2} \right)
\frac{1}{\sqrt{n}} ✓ \sqrt{1/n}
\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}} ✗ 3
{@Neillier 1276915 4951077 x {1,1-3-10);5_GENERAL2. _HEADERS1 Orchestra} ✗ 92.5857658508735
28 percent ✓ 28\%
14.0 + -1.0i ✓ 14 - i
Theta(log log n) ✗ O(\log \log n)
A ✓ A
-2,1 ✓ 1,-2
50% ✓ 50\%
\frac12 ✓ \frac{1}{2}
\frac34 ✓ \frac{3}{4}
\frac{1}2 ✓ \frac{1}{2}
(3, \frac{\pi}{2}) ✓ \left( 3, \frac{\pi}{2} \right)
25 ✓ 025
025 ✓ 25
\sqrt ✗ 5
The last three digits of \(2003^{2002^{2001}}\) are \boxed{009} ✓ 9
\frac{1}{2} ✓ \frac{1}{2}
z \in \left[-\frac{3}{2}, -1\right] \cup \left[1, \frac{3}{2}\right] ✓ 1\leq|z|\leq \frac{3}{2}
(7,11),\ (11,7) ✓ (11,7)or(7,11)
7:32 ✓ S_{MBCN}:S=7:32
(5,2),(7,2) ✓ p=5,q=2;p=7,q=2
First \boxed{3}. Wait, no. So the answer is \boxed{5}. ✓ 5
\boxed{3, 5} ✗ 5
5=6 ✗ 6
5=6 ✗ 5
\boxed{x=5} ✓ 5
5 ✓ x=5
x ✗ 5
\boxed{} ✗ 5
\boxed{ } ✗ 0
\boxed{5} ✓ 5
\boxed{5}. ✓ 5
$5$. ✓ 5
90 ✓ 90^\circ
\boxed{90\text{ degrees}} ✓ 90
50 ✗ 0.5\%
100 ✗ 1
\boxed{0.01} ✗ 1
[1,2) ✗ [1,2]
(2,1) ✗ (1,2)
\boxed{1,2} ✓ \{1,2\}
\{1,2,2\} ✓ \{1,2\}
1,2 ✗ 1,2,3
\boxed{1,2,3} ✗ 1,2
1 \text{ and } 2 ✓ 1,2
(-\infty,2) ✓ x<2
\boxed{\mathbb{R}} ✓ (-\infty,\infty)
1 \frac12 ✓ 1.5
3\frac{1}{2} ✗ \frac{3}{2}
\boxed{1,\!234} ✓ 1234
1,234,567 ✓ 1234567
12,34 ✗ 1234
\boxed{1,234} ✗ (1,234)
10,000 ✓ 10000.0
1.5\times 10^{3} ✓ 1500
\boxed{3.14} ✗ \pi
5\text{ cm} ✓ 5
\$5 ✓ 5
\boxed{5 \text{ apples}} ✓ 5
(C) ✓ C
C ✓ (C)
\boxed{\text{evelyn}} ✓ \text{Evelyn}
\text{no} ✗ Yes
\infty ✓ +\infty
\boxed{-\infty} ✗ \infty
0/0 ✗ 5
\pm 3 ✓ 3,-3
\boxed{3} ✗ \pm 3
−5 ✓ -5
2×3 ✓ 6
\boxed{√2} ✓ \sqrt{2}
π ✓ \pi
\boxed{\dfrac12} ✓ \frac12
1/2 ✓ \frac12
\frac{1}{-2} ✓ -\frac{1}{2}
\boxed{\frac{\sqrt2}{2}} ✓ \frac{1}{\sqrt{2}}
2\sqrt3 ✓ \sqrt{12}
e^{i\pi} ✓ -1
\boxed{10!} ✓ 3628800
\begin{pmatrix}1&2\end{pmatrix} ✗ \begin{pmatrix}1\\2\end{pmatrix}
(x+1)^2 ✓ x^2+2x+1
\boxed{(x+1)^2} ✗ x^2+2x+2
x+y ✗ a+b
\sin^2 x+\cos^2 x ✓ 1
\boxed{ab} ✓ ba
\boxed{10^{10^{10}}} ✗ 5
(10^{9})! ✗ 5
\boxed{\int_0^1 e^{-x^{x^{x}}} dx} ✗ 5
\boxed{2^{0.5^{0.5^{0.5^{0.5}}}}} ✗ 5
\boxed{\sin(10^{10^{10}})} ✗ 5
\boxed{-5} ✓ −5
5 km ✗ 5 m
1/2006! ✗ 1/2004!
\frac{1}{2006!} ✗ \frac{1}{2004!}
2516_7 ✗ 2516_8
2516_{8} ✓ 2516_8
2516₈ ✓ 2516_8
0.33 ✗ \frac13
10^{-20} ✗ 0
1e-10 ✗ 0
x \in (1,2) ✓ (1,2)
(1,2] ✓ 1<x\le2
\{x \mid x \geq 2\} ✓ [2,\infty)
x=1 \text{ or } x=2 ✓ 1,2
\frac{-1}{2} ✓ -\frac{1}{2}
\frac{3}{6} ✓ \frac12
.5 ✓ 0.5
1000000 ✓ 10^6
1.0\times10^6 ✓ 1000000
\sqrt{4} ✓ 2
\sqrt{-1} ✓ i
2^{10} ✓ 1024
2^10 ✓ 1024
\log_2 8 ✓ 3
\ln e ✓ 1
\cos 60^\circ ✓ 1/2
\arctan 1 ✓ \frac{\pi}{4}
3:4 ✓ \frac34
3:4 ✗ \frac43
(x-1)(x+1) ✓ x^2-1
\text{(A)} ✓ A
\mathrm{A} ✓ A
C ✗ D
Yes ✓ \text{yes}
\mathbf{5} ✓ 5
\fbox{5} ✓ 5
inf ✓ \infty
x**2 ✓ x^2
2*x ✓ 2x
sqrt(2)/2 ✓ \frac{\sqrt2}{2}
(1+sqrt(5))/2 ✓ \frac{1+\sqrt5}{2}
3i+2 ✓ 2+3i
2-3i ✗ 2+3i
\angle A = 60^\circ ✓ 60
12 \text{ ways} ✓ 12
\text{12 ways} ✓ 12
$12$ ways ✓ 12
\$1,000 ✓ 1000
\$18.90 ✓ 18.9
5\,\text{cm}^2 ✓ 5
5 cm ✓ 5 \text{ cm}
5 \text{ cm} ✗ 5 \text{ mm}
\frac{5}{2} \text{ hours} ✓ 2.5
4x+2y=6 ✓ 2x+y=3
4x+2y=6 ✗ 2x+y=4
y=2x+1 ✓ 2x-y+1=0
x=2 ✓ 2=x
5=x ✓ 5
\mathbb{R}\setminus\{3\} ✓ (-\infty,3)\cup(3,\infty)
x \neq 3 ✓ (-\infty,3)\cup(3,\infty)
(1,2),(3,4) ✓ (3,4),(1,2)
(2,1),(3,4) ✗ (3,4),(1,2)
[1,2] ✗ (1,2)
\langle 1,2\rangle ✓ (1,2)
b=2,a=1 ✓ a=1,b=2
a=2,b=1 ✗ a=1,b=2
\lfloor 3.7\rfloor ✓ 3
0.1+0.2 ✓ 0.3
0.3333 ✗ 1/3
1E100 ✓ 10^{100}
10^{100}+1 ✗ 10^{100}
99!\cdot 100 ✓ 100!
9^{9^{9}} ✗ 3
9^{9^{9}} ✓ 9^{9^9}
2.718 ✗ e
1.414214 ✓ \sqrt2
1.4142 ✗ \sqrt{2}
22/7 ✗ \pi
3.141592653589793 ✓ \pi
1.0000001 ✗ 1
-0 ✓ 0
+5 ✓ 5
5% ✓ 0.05
0.05 ✓ 5\%
0.5 ✗ 5\%
1{,}234 ✓ 1234
\frac{a}{b} ✓ a/b
yx^2 ✓ x^{2}y
\binom{5}{2} ✓ 10
\frac{1}{\tan x} ✓ \cot x
\sin(2x) ✓ 2\sin x\cos x
y=x^2 ✓ x^2
n ✗ m
\{\} ✓ \emptyset
\varnothing ✓ \emptyset
x_1=1, x_2=2 ✓ 1,2
\pm\sqrt2 ✓ \sqrt2,-\sqrt2
\pm \sqrt 2 ✗ \sqrt2
2\pm 3i ✓ 2+3i,2-3i
\text{A, C} ✓ A,C
1\pm\sqrt{19} ✓ 1-\sqrt{19}, 1+\sqrt{19}
6 ✗ 6m
6m ✗ 6
6 m ✓ 6\text{ m}
6 m ✓ 6
2ab ✗ 2
x ✗ \frac{1}{x}
-x ✗ x
x ✗ \left|x\right|
\lfloor x\rfloor ✗ x
\lceil n/2\rceil ✓ \lfloor (n+1)/2\rfloor
R^2-r^2 ✗ 0
r^2-R^2 ✗ R^2-r^2
(R-r)(R+r) ✓ R^2-r^2
0.\overline{3} ✓ \frac13
0.1\overline{6} ✓ 1/6
0.\overline{3} ✗ 0.3
1.5e3 ✓ 1500
n(n+1)/2 ✓ \frac{n(n+1)}{2}
\sum_{k=1}^n k ✓ \frac{n(n+1)}{2}
x<2 \text{ or } x>5 ✓ (-\infty,2)\cup(5,\infty)
-1<x<2 ✓ (-1,2)
120^{\circ} ✓ 120°
2\pi r ✓ 2r\pi
\text{no} ✓ No
on ✗ \text{no}
\text{seat} ✗ \text{east}
5 \text{ square units} ✓ 5
5 \text{ units}^2 ✓ 5 \text{ square units}
25 \text{ square cm} ✓ 25 \text{ cm}^2
25 \text{ cm}^3 ✗ 25 \text{ cm}^2
\left\{\frac12, 3\right\} ✓ \{3, 0.5\}
\frac{1}{2}, 3 ✗ \{3, 0.25\}
a+b=5 ✓ 5
x=5=6 ✗ 6
2+3=5 ✓ 5
2x=10 ✗ 10
\frac{10}{2} = 5 ✓ 5
x^2+y^2=25 ✓ x^2+y^2-25=0
25 ✗ x^2+y^2=25
(B) 12 ✓ 12
(B) ✓ B
B ✓ \text{(B)}
\text{B} ✓ B
1\frac{1}{2} ✓ \frac32
3\tfrac12 ✓ 3.5
10\,080 ✓ 10,\!080
2.0 ✓ 2
\frac{10}{5} ✓ 2
2^{-2/3}, 8 ✓ 8, 2^{-2/3}
f(x)=x+1, f(x)=-1 ✓ f(x)=-1,f(x)=x+1
-1, x+1 ✓ f(x)=-1,f(x)=x+1
\log_{10} 2 ✓ \log 2
\frac{\ln 2}{\ln 2-\ln 3} ✓ \frac{\log 2}{\log 2-\log 3}
45 minutes ✓ 45
4.2\% ✓ 4.2
\frac{1}{6}\pi ✓ \frac{\pi}{6}
-\log_{10}250, 2 ✓ 2,-\log _{10} 250
3,1,-1 ✗ 1,-1
1,1,3,16 ✓ 16,3,1,1
1,3,16 ✗ 16,3,1,1
\left[\begin{array}{cc}1&2\\3&4\end{array}\right] ✓ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ✗ \begin{pmatrix}1&3\\2&4\end{pmatrix}
\frac{1}{2}\begin{pmatrix}2&4\\6&8\end{pmatrix} ✓ \begin{pmatrix}1&2\\3&4\end{pmatrix}
2^{1009} ✓ 2^{1009}+0
2^{1009}+1 ✗ 2^{1009}
e^{\ln 5} ✓ 5
\frac{100!}{2^{50}} ✓ 100!\cdot 2^{-50}
\frac{100!}{2^{50}}+1 ✗ \frac{100!}{2^{50}}
x^3+3x-6 ✓ 3x + x^3 - 6
100,000 ✓ 100000
100, 200, 300 ✓ 300,200,100
1,234 ✗ (1,234)
90\degree ✓ 90
5x - 7y + 11z + 4 = 0 ✓ -5x+7y-11z-4=0
5x - 7y + 11z + 4 = 0 ✗ 5x-7y+11z-4=0
k\ge2 ✓ k \geqslant 2
k > 2 ✗ k \geqslant 2
k \le 2 ✗ k \geqslant 2
\{(1,2),(3,4)\} ✓ (1,2),(3,4)
(\frac{1}{2},\infty) ✓ (0.5,+\infty)
x^2-2x+2 ✓ g(x)=x^2-2x+2
\frac{\sqrt{3}}{3} ✓ \frac{1}{\sqrt{3}}
(2,-3) ✓ (2,−3)
\text{ even } ✓ even
x = 3, y = 4 ✓ (3,4)
-2 + 7i ✓ 7i - 2
5\sqrt[3]{4} ✓ 5 \cdot 4^{1/3}
4^{1/3} ✓ 4^(1/3)
4^{1/3} ✗ 4/3
$5$ ✓ \(5\)
\[5\] ✓ 5
5\text{.} ✓ 5
x \approx 5 ✓ x \approx 5
\sqrt{2} ✗ \sqrt{3}
17 \bmod 5 ✗ 5
foo 5 ✗ 5
5 5 ✗ 10
2 3 ✗ 5
3 \cdot 10^{-5} ✓ 0.00003
6.72 \times 10^{-5} ✓ .0000672
6.72e-5 ✓ .0000672
\dfrac{17}{50} ✓ 0.34
34\% ✓ 0.34
1 : 2 : 3 ✓ 1:2:3
2:4:6 ✓ 1:2:3
1:3:2 ✗ 1:2:3
\frac{\pi^2-9}{9} ✓ \frac{\pi^{2}}{9}-1
t(t+1) ✓ t^2+t
\frac{1}{x+1} ✓ (x+1)^{-1}
a^{b+c} ✓ a^b a^c
\sqrt{x^2+2x+1} ✓ \left|x+1\right|
\sqrt{x^2+2x+1} ✗ x+1
\frac{x^2-1}{x-1} ✓ x+1
\max(1,2) ✓ 2
\gcd(4,6) ✓ 2
-(-3) ✓ 3
2.50 ✓ \frac{5}{2}
\infty ✗ -\infty
5 ✗ \infty
x\to\infty ✓ x\to\infty
(a,b)=(1,2) ✓ (1,2)
m=\frac{1}{2} ✓ 0.5
A=5 ✓ 5
\text{Area}=5 ✓ 5
Answer: 5 ✓ Answer: 5
5\ \mathrm{m/s} ✓ 5
5\ \mathrm{m/s} ✗ 5\ \mathrm{m}
5\ \mathrm{m/s} ✓ 5 m/s
60 mph ✓ 60
5 \text{ mins} ✓ 5 \text{ minutes}
3\text{ feet} ✓ 3\text{ ft}
7 \text{ people} ✓ 7
7 \text{ cats} ✗ 7 \text{ dogs}
\{1, 2, 3\} ✓ 1,2,3
\{1, 2, 3\} ✗ 1,2,4
\left(-\infty, 2\right] ✓ x\le 2
2 \ge x ✓ x\le 2
\tan^{-1}(1) ✓ \frac{\pi}{4}
\cos^2\theta ✓ 1-\sin^2\theta
\cos\theta ✗ \sin\theta
\frac{n!}{(n-1)!} ✓ n
p - q ✓ -q+p
(a + 5)(b + 2) ✓ (b+2)(a+5)
x^5 - x^4 + x^3 - x^2 + x - 1 ✓ (x-1)(x^4+x^2+1)
11\sqrt{2} ✓ 11\sqrt2
\frac{270}{7} ✓ \frac{270}7\text{ degrees}
\frac{270}{7}^\circ ✓ \frac{270}7\text{ degrees}
west ✓ \text{West}
west ✗ \text{east}
5. ✓ 5
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix} ✓ \begin{bmatrix}-\frac13\\ \frac23\end{bmatrix}
(\begin{pmatrix}-\frac{7}{4}&-2\\4&1\\\end{pmatrix}) ✓ \begin{pmatrix}-7/4&-2\\4&1\end{pmatrix}
\text{Area} + 2 ✗ \text{Area} - 2
x.y ✗ 0
1/2006! ✗ \frac{1}{2004!}
1 1/2 ✓ 1.5
\frac{\pi}{2006!} ✗ \frac{\pi}{2004!}
\sqrt{3+2\sqrt{2}}-\sqrt{2}-1 ✓ 0
\sqrt[3]{-8} ✓ -2
\sqrt{a}\sqrt{b} ✓ \sqrt{ab}
\boxed{\ 5\ } ✓ 5
|x|>1 ✓ (-\infty,-1)\cup(1,\infty)
|x|<1 ✗ (-\infty,-1)\cup(1,\infty)
n=2^{10}=1023 ✗ 1023
5 \neq 6 ✗ 6
5\text{ is wrong, it is } 6 ✗ 6
0 ✗ \emptyset
E = (2, 3) ✓ E(2,3)
P(2,3) ✗ Q(2,3)
x \in \{-1, 2\} ✓ \{2,-1\}
2x=3, 2y=1 ✗ (3,1)
x=1, y=2 ✗ a=1, b=2
x=\pm 3 ✓ x=3, x=-3
1\pm\sqrt{2}, 3 ✓ 3, 1+\sqrt2, 1-\sqrt2
1,1,2 ✗ 1,2,2
\{1,2\} ✗ \{1,2,3\}
\{1,2,3\} ✗ \{1,2\}
{1,2} ✓ 2,1
1:2:3 ✗ 1:4:3
AB:BC=2:3 ✓ 2:3
1, 2 ✗ [1,2]
((((((((((((((((((((5)))))))))))))))))))) ✓ 5
((5) ✗ 6
{5} ✓ 5
5=6 ✗ 7=8
5=6 ✗ \{1,2\}
5!=120 ✓ 120
x != 3 ✓ x \neq 3
\mathrm{e}^2 ✓ e^2
x \lt 2 ✓ (-\infty,2)
θ ✓ \theta
α+β ✓ \beta+\alpha
\tan^2(y)+1 ✓ \sec^2(y)
|20\cos(\frac{9\pi}{44})| ✓ \sqrt{400\cos^2(\frac{9\pi}{44})}
\sqrt[3]{x^2-2}^2 ✓ (x^2-2)^{2/3}
{6 \choose 3} ✓ 20
\sum_{k=1}^{\infty} \frac{1}{k^2} ✓ \frac{\pi^2}{6}
\lim_{n\to\infty}\frac{1}{n} ✓ 0
k! ✓ k(k-1)!
0.\dot{3} ✓ \frac13
123,456.5 ✓ 123456.5
\$1,234.50 ✓ 1234.5
12,34.5 ✗ 1234.5
1 234 ✓ 1234
€5 ✓ 5
A. 5 ✓ 5
(A)\ 5 ✗ 6
A) 5 ✓ A
5 sq cm ✓ 5\text{ cm}^2
5 \text{ m/s}^2 ✗ 5 \text{ m/s}
5 \text{ cm} ✓ 5 \text{ centimeters}
5 \text{ hours} ✗ 5 \text{ days}
M = \begin{pmatrix}1&2\\3&4\end{pmatrix} ✓ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ✓ \begin{pmatrix}1.0&2\\3&\frac{8}{2}\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ✗ \begin{pmatrix}1&2\\3&4.001\end{pmatrix}
\begin{bmatrix}x&y\end{bmatrix} ✗ \begin{bmatrix}y&x\end{bmatrix}
\begin{vmatrix}1&2\\3&4\end{vmatrix} ✗ \begin{pmatrix}1&2\\3&4\end{pmatrix}
(0,2)\cup(1,3) ✓ (0,3)
(0,1)\cup(2,3) ✗ (0,1)\cup(2,4)
\{x | x > 2\} ✓ (2, \infty)
\{x \in \mathbb{R} : x > 2\} ✓ (2,\infty)
x<2 ✗ (-\infty,2]
1\le x<2 ✓ [1,2)
1<x<2 ✗ [1,2)
x>2 ✗ x>3
x \ge 0 ✗ 0
2<x ✓ x>2
0<a<\frac{1}{e} ✗ (0,\frac{1}{e}]
0<x<10^{20} ✗ 0<x<10^{20}+1
m<-2 \text{ or } m>2 ✗ (-\infty,-2]\cup[2,\infty)
2(x+1) = 6 ✓ x = 2
101_2 ✗ 110_2
n\equiv 1 \pmod 3 ✗ n \equiv 2 \pmod{3}
2\mathbf{i}+3\mathbf{j} ✗ 2\mathbf{i}-3\mathbf{j}
(\frac{\pi}{3}, \frac{2\pi}{3}) ✗ (\frac{2\pi}{3}, \frac{\pi}{3})
\frac{1}{2} = 0.6 ✗ 0.6
"""

# A choice each, with its reason. "The box" is always the last one.
POLICY = [
    (False, r"\frac{100}{3}", "33.3", "a gold that was rounded is not the number"),
    (False, r"\forall x>0, f(x) = 0", "f(x) = 0", "a condition is part of the answer"),
    (True, "28", r"28\%", "a percentage may drop its sign"),
    (True, "0.28", r"28\%", "or be a number"),
    (True, "-2*pi", r"-2\pi", "a bare pi is pi"),
    (False, "There are 73 of them.\n\nFinal answer: **73**", "73", "nothing is dug out of prose"),
    (True, "**73**", "73", "bold alone is no prose"),
    (True, "2516", "2516_8", "the question names the base"),
    (True, "2516_8", "2516", "so a gold may leave it out too"),
    (False, r"<boxed{70}\).</answer>", "70", "no box"),
    (False, r"\boxed{5", "5", "a box that was cut off"),
    (True, r"\boxed{5} and then \boxed{6", "5", "the last complete box"),
    (False, r"\boxed{(1, 2)}, \boxed{(2, 1)}", "(1,2),(2,1)", "one box, the last"),
    (True, r"\boxed{\left\{1, \left\{2\right\}\right\}}", r"\{1,\{2\}\}", "sets nest"),
    (False, r"\frac{\pi}{2}", r"90^\circ", "radians are not degrees"),
    (False, r"\{1,2\}", "(1,2)", "a set has no order"),
    (True, "1, 2", "(1,2)", "a list in the order of a tuple"),
    (False, "2, 1", "(1,2)", "and only in that order"),
    (False, "0,5", "0.5", "a comma separates"),
    (True, "0.3333333", r"\frac{1}{3}", "six digits or more stand for a fraction without end"),
    (True, "0.33333", "0.33333", "fewer for themselves"),
    (False, "0.33333", r"\frac{1}{3}", "only"),
    (False, "0.333333", "0.3333334", "two decimals are compared exactly"),
    (True, r"\textbf{(B) } 12", "12", "a choice and its value"),
    (True, "–5", "-5", "an en dash is a minus sign"),
    (True, "５", "5", "full-width digits are digits"),
    (True, "½", r"\frac12", "and so are vulgar fractions"),
    (False, "٥", "5", "other scripts are not"),
    (True, r"\sum_{k=1}^{10} k", "55", "a value is a value, written out or not"),
    (True, r"\int_0^1 x\,dx", "0.5", "also as an integral"),
    (False, r"17 \bmod 5", "2", "but not as a remainder"),
    (False, "f(t)=2t", "f(x)=2x", "the variables are the question's"),
    (True, "|x|", r"\sqrt{x^2}", "variables are real"),
    (False, "-2, -2", "-2", "a list keeps its repetitions"),
    (True, r"\{-2, -2\}", "-2", "a set does not"),
    (True, "5 m", "5", "a unit, as the gold is a number"),
    (False, r"500 \text{ cm}", r"5 \text{ m}", "units are not converted"),
    (False, "r^2", "R^2", "R is not r"),
    (False, "(1,2)", "[1,2]", "an end of an interval counts"),
    (True, r"\boxed{x^2+y^2=25}", "25", "what the question asks for may be named"),
    (False, "25", "x^2+y^2=25", "but an equation is asked for as a whole"),
    (False, "x>0", "y>0", "an inequality is about its variable"),
    (False, r"\text{Answer: }5", "5", "prose, also in a box"),
]


def table(text):
    for line in text.strip().splitlines():
        sign = "✓" if "✓" in line else "✗"
        prediction, gold = line.split(f" {sign} ")
        yield sign == "✓", prediction, gold


def wrong_ones(pairs):
    pairs = list(pairs)
    with ThreadPoolExecutor(2) as threads:
        verdicts = threads.map(lambda pair: math_equal(pair[1], pair[2]), pairs)
        found = [
            (*pair[1:3], verdict)
            for pair, verdict in zip(pairs, verdicts, strict=True)
            if verdict is not pair[0]
        ]
    return found


def test_last_box():
    cases = {
        r"\boxed{12}, \boxed{15}, \boxed{12} and again \boxed{12}": "12",  # reference fault 3
        r"\boxed{\frac{1}{\sqrt{2}}}": r"\frac{1}{\sqrt{2}}",
        r"\boxed{\boxed{5}}": "5",
        r"\boxed{x = \boxed{5} }": "5",
        r"\boxed{}": "",
        r"\boxed{ }": "",
        r"\boxed {5}": "5",
        r"\\boxed{5}": "5",
        r"a\\\boxed{5}": "5",
        r"\boxed{\left\{ 1 \right.}": r"\left\{ 1 \right.",
        r"\boxed{\{1\}}": r"\{1\}",
        r"stray } and { here, \boxed{5}": "5",
        r"\boxed{3} but \boxed{5": "3",
        r"\boxed{5": None,
        "5": None,
        r"boxed{5}": None,
        "": None,
    }
    assert {text: extract_answer(text) for text in cases} == cases
    assert extract_answer(r"\boxed{" * 100_000) is None
    assert extract_answer(r"\boxed{" * 50_000 + "7" + "}" * 50_000) == "7"


def test_firm_pairs():
    assert wrong_ones(table(FIRM)) == []


def test_policy_pairs():
    assert wrong_ones(POLICY) == []


def test_typography():
    pairs = [(True, "5\u200b", "5"), (True, "\u22125", "-5"), (True, "5\u00a0cm", "5 cm")]
    pairs += [(True, "x\u00b2+1", "x^2+1"), (True, "\u221a12", r"2\sqrt{3}"), (False, "x2", "x^2")]
    pairs += [(True, "2\u03c0", r"2\pi"), (True, "x \u2264 2", r"(-\infty, 2]")]
    assert wrong_ones(pairs) == []


GOLDS = r"""
204 | 025 | 073 | 7 | -50 | 0 | 13535 | 1.25 | .0000672 | 10,\!080 | \frac{14}{3} | \dfrac{17}{50}
\frac65 | 70 \sqrt{2} | 11\sqrt2 | \frac{\sqrt{3}}{4} | \pi | -\frac{\pi}{6} | 6 - 5i | 1+274i
52_8 | 4210_{5} | 2516_8 | 90^\circ | \frac{270}7\text{ degrees} | \text{Evelyn} | \text{even}
\text{east} | p - q | 2k+2 | x^3+3x-6 | (a+5)(b+2) | \cot x | x=4 | 1,-2 | 3, 5, 7
1 \pm \sqrt{19} | (6,31,-1) | \left( 3, \frac{\pi}{2} \right) | (3,4] | (2,\infty)
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix} | 5x - 7y + 11z + 4 = 0 | \frac{1}{2 n+2}
2^{1009} | \binom{2n}{n} | m n-\lfloor m / 2\rfloor | (1,8,19), (2,7,13), (4,5,7) | 69,84
f(n)=n, g(n)=1 | \frac{100!}{2^{50}} | \left\lfloor\log _{2} n\right\rfloor+1 | m_{\max }=n^{2}-n-1
k \geqslant 2 | f(x)=a x+b, where $b$ is an arbitrary integer | (-\infty, 0) \cup\{1\}.
\frac{8}{\sqrt[3]{7}} | t(0,4] | 62.5% | 8 \% | (45^{\circ}, 60^{\circ}),(135^{\circ}, 60^{\circ})
10^{100},10^{1 / 100} | \angle B E A_{1}=90,\angle A E B_{1}=90 | \frac{\log 2}{\log 2-\log 3}
x=\frac{1}{6} \pi+\pi k, \frac{1}{3} \pi+\pi k | 2,-\log _{10} 250 | 548 \pi | -2,-2
"""


def test_golds_equal_themselves_and_nothing_else():
    """Rows in the manner of AIME, MATH-500 and OlympiadBench."""
    golds = [gold.strip() for line in GOLDS.strip().splitlines() for gold in line.split(" | ")]
    assert len(golds) > 65 and all(map(usable_gold, golds))
    respelled = [
        rf"So \boxed{{ {gold.replace(chr(92) + 'frac', chr(92) + 'tfrac')} }}." for gold in golds
    ]
    pairs = [(True, *pair) for pair in zip(respelled, golds, strict=True)]
    pairs += [(False, *pair) for pair in zip(golds, golds[1:] + golds[:1], strict=True)]
    pairs += [(False, f"{gold}+1", gold) for gold in golds if "t(0" not in gold]
    assert wrong_ones(pairs) == []


def test_integers_are_exact_at_any_length():
    """Reference fault 2: 541 was 540 there."""
    assert [math_equal("541", "540"), math_equal("402", "400")] == [False, False]
    long = "9" * 100_000
    assert math_equal(f"00{long}", long) is True
    assert math_equal(long[:-1] + "8", long) is False
    assert math_equal(rf"\boxed{{{long}}}", "5") is False


def test_unusable_golds_are_none_and_counted():
    before = reward.counts()["math_unusable_gold"]
    for gold in ("", "  ", "$$", r"\boxed{}", r"\frac{1}{", "x" * 10_001, "?"):
        assert math_equal("5", gold) is None and math_reward(r"\boxed{5}", gold) is None
        assert not usable_gold(gold)
    assert reward.counts()["math_unusable_gold"] == before + 14
    task = SimpleNamespace(id="t:1", kind="math", question="", answer="$$", tests=None)
    with pytest.raises(ValueError, match="t:1.*usable_gold"):
        score(task, r"\boxed{5}")


def test_tolerance_is_absolute():
    """OlympiadBench has a gold 4.2 with an error of 1e-1."""
    verdicts = [math_equal(given, "4.2", tolerance=0.1) for given in ("4.3", "4.1", "4.31", "420")]
    assert verdicts == [True, True, False, False]
    assert math_equal(r"3\sqrt{2}", "4.2", tolerance=0.1) is True  # 4.243
    assert math_equal(r"3\sqrt{2}", "4.2") is False
    assert math_equal("4", "5", tolerance=1) is True
    task = SimpleNamespace(
        id="t", kind="math", question="", answer="4.2", tests=None, tolerance=0.1
    )
    assert score(task, r"\boxed{4.3}") == 1.0


HOSTILE = {
    "towers": "9^{9^{9^{9}}}",
    "tower 2": r"2003^{2002^{2001}}-\frac{5^{5^{5^{5}}}}{16}",
    "factorials": "((10!)!)!",
    "exp": r"\exp(10^{10})\sin(10^{10^{10}})",
    "binomial": r"\binom{10^8}{5\cdot 10^7}",
    "long sum": r"\sum_{k=1}^{999999999} k^{k}",
    "braces": "{" * 100_000,
    "box braces": r"\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
    "nested": r"\frac{1}{" * 60 + "2" + "}" * 60,
    "parentheses": "(" * 4000 + ")" * 4000,
    "commas": "1," * 4900,
    "equals": "=".join("1" * 300),
    "backslashes": "\\" * 9999,
    "plus-minus": r"\pm 1" * 40,
    "NUL": "1\0" * 400,
    "surrogates": "\ud800x\udfff",
    "many boxes": r"\boxed{5} " * 2000,
    "spaces": "x" + " " * 9000 + "y",
    "macros": r"\text{" * 1000,
    "power": "x^{999999}",
    "digits": "7." + "3" * 9000,
}


def test_hostile_inputs_are_wrong_and_kill_nothing():
    before = reward.counts()
    for name, text in HOSTILE.items():
        assert math_equal(text, "12") is False, name
        assert math_equal("x+12", text) in (False, None), name
    assert math_equal("2(k+1)", "2k+2") is True
    assert reward.counts()["math_worker_died"] == before["math_worker_died"]


BURNER = r"\int_0^1 \sqrt{1+x^3}\ln(1+\sin x) dx"  # nothing forbids it, and it takes for ever


def workers() -> list[reward._Worker]:
    return reward._idle


def gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_the_cpu_limit_ends_a_worker_and_the_next_one_answers(monkeypatch):
    monkeypatch.setattr(reward, "MATH_CPU_S", 0.5)
    assert math_equal("2(k+1)", "2k+2") is True
    pid, before = workers()[-1].process.pid, reward.counts()
    assert math_equal(BURNER, "5") is False
    after = reward.counts()
    assert after["math_limit"] == before["math_limit"] + 1
    assert after["math_worker_died"] == before["math_worker_died"]
    assert gone(pid, 1) and math_equal("2(k+1)", "2k+2") is True


def test_a_stopped_worker_meets_the_wall_limit(monkeypatch):
    assert math_equal("2(k+1)", "2k+2") is True
    monkeypatch.setattr(reward, "MATH_WALL_S", 0.5)
    pid, before = workers()[-1].process.pid, reward.counts()["math_limit"]
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    assert math_equal("3(k+1)", "3k+3") is False  # right, but there is no answer
    assert 0.4 < time.monotonic() - start < 60 and gone(pid, 1)
    assert reward.counts()["math_limit"] == before + 1


def test_a_dead_worker_is_wrong_counted_and_replaced():
    assert math_equal("2(k+1)", "2k+2") is True
    before = reward.counts()["math_worker_died"]
    for worker in workers():
        worker.process.kill()
    killed = len(workers())
    verdicts = [math_equal("3(k+1)", "3k+3") for _ in range(killed + 1)]
    assert verdicts == [False] * killed + [True]
    assert reward.counts()["math_worker_died"] == before + killed


def test_after_ctrl_c_a_worker_is_not_used_again(monkeypatch):
    """It would answer the interrupted question when the next one is asked."""
    assert math_equal("2(k+1)", "2k+2") is True
    pid, idle = workers()[-1].process.pid, len(workers())

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reward._Worker, "ask", interrupted)
        math_equal("3(k+1)", "3k+3")
    assert gone(pid, 1) and len(workers()) == idle - 1
    assert math_equal("2(k+1)", "2k+2") is True


def test_a_worker_has_its_own_session_no_secrets_and_limited_memory():
    assert math_equal("2(k+1)", "2k+2") is True
    pid = workers()[-1].process.pid
    assert os.getsid(pid) == pid
    with open(f"/proc/{pid}/environ") as environment:
        assert SECRET not in environment.read()
    with open(f"/proc/{pid}/limits") as limits:
        space = next(line for line in limits if line.startswith("Max address space"))
    assert space.split()[3] == str(reward.MATH_MEMORY_MB << 20)


def test_workers_end_with_their_host_even_when_busy():
    """After kill -9 an idle worker sees its channel close, a busy one meets its CPU limit."""
    program = f"""
import sys, threading; sys.path.insert(0, {os.path.dirname(reward.__file__)!r})
import reward
reward.math_equal("2(k+1)", "2k+2")
print(reward._idle[0].process.pid, flush=True)
if len(sys.argv) > 1:
    reward.MATH_CPU_S = 0.5
    threading.Thread(target=reward.math_equal, args=({BURNER!r}, "5")).start()
    print("busy", flush=True)
threading.Event().wait()
"""
    for arguments in ([], ["busy"]):
        host = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
        )
        try:
            pid = int(host.stdout.readline())
            for _ in arguments:
                host.stdout.readline()
                time.sleep(0.3)
        finally:
            host.kill()
            host.wait()
            host.stdout.close()
        assert gone(pid, 60), arguments


def test_a_forked_child_starts_its_own_workers():
    assert math_equal("2(k+1)", "2k+2") is True
    mine = workers()[-1].process.pid
    child = os.fork()
    if child == 0:
        fine = math_equal("2(k+1)", "2k+2") and workers()[-1].process.pid != mine
        reward.close()
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert math_equal("2(k+1)", "2k+2") is True and workers()[-1].process.pid == mine


def test_integers_ask_no_worker():
    task = SimpleNamespace(id="t", kind="math", question="", answer="42", tests=None)
    before = reward.counts()
    rewards = [score(task, rf"Then \boxed{{{n % 100}}}.") for n in range(10_000)]
    assert sum(rewards) == 100
    assert reward.counts() == before


def test_score_from_many_threads_is_keyed_right():
    golds = [f"{n}k+{n}" for n in range(2, 22)]
    tasks = [SimpleNamespace(id=g, kind="math", question="", answer=g, tests=None) for g in golds]
    jobs = [(task, rf"\boxed{{{n}(k+1)}}") for task in tasks for n in range(2, 22, 5)]
    with ThreadPoolExecutor(8) as threads:
        rewards = list(threads.map(lambda job: score(*job), jobs))
    assert rewards == [float(task.answer.split("k")[0] == r[7:].split("(")[0]) for task, r in jobs]
    assert len(workers()) <= len(os.sched_getaffinity(0))
    assert score(tasks[0], "2k+2") == 0.0  # no box


def test_requests_survive_json():
    """What a model writes crosses as JSON, so half a surrogate pair is no error."""
    assert json.loads(json.dumps({"x": "\ud800"})) == {"x": "\ud800"}
    assert math_equal("\ud800 x", "x") is False
