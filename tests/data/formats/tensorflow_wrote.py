"""Files that TensorFlow 2.21 wrote, byte for byte: the same three Examples plain and compressed.

    rows = [
        {"x": [0.5, -1.25, 3e38, 1e-45], "id": [-1], "many": [1, 300, -2**63, 2**63 - 1], "name": ["größe"],
         "raw": [bytes(range(6))]},
        {"x": [0.0, 1.0, 2.0, inf], "id": [0], "many": [], "name": [""], "raw": [6 * b"\xff"]},
        {"x": [1.0, 1.0, 1.0, 1.0], "id": [7], "extra": [9.0]},
    ]

with tf.io.TFRecordWriter(path, None or "GZIP"), each
tf.train.Example(...).SerializeToString(deterministic=True).
"""

from __future__ import annotations

import base64

PLAIN = base64.b85decode(
    "e*gdg00000P&pdQ3VjL`3Ib_l5)K*+3JU-K|NsC0|Ns913L**wZDDSC5*iv93KjvZ0)T*kfPjF2fPex2|NsC0|NsAg3KI$hZeeX@"
    "5(^3m3I}I$!?wepWeO1r19D+^5()|k3I+fH0s{mE3K<FkcoGy65(*Fi002J#0HD9-v0;A!0002(u6wyx000000002yx|ECxRSF9V"
    "0%>Ft1sVei0RRdL3IuIoZg~;{8UP9m3IuLpZDkS!3IYlM3K0qea$$E83JM4c2LJ#6|Ns9A843Y-5)={=3J?GQ00000fIk2L06+i$"
    "fPdABv*tYj00000003Y~@$3pa3K0qgWq5RQVG;-u1_}fK01!b63km{hWD*4$0}25L3K<FkcoGy65(*Fi0DwOL0DwOL0DwOL0DwRJ"
    "wH|8"
)
GZIPPED = base64.b85decode(
    "ABzY80000000XOMfPer?sncAwTq0adnJGeiQaoH-|6zcUONommH!-hLNJ>hAON?<1Qv(bz!qn7r33IXJCFZ6IadUBUv8NXu-gbC?"
    "DwiM^b5UZs5EmB*7aId36Eh1dmn0Wsg^-Al5SIYZR(l491^b_EOsr=Fa^9}1-Wd*c&a+)pdbmQlxWUe0m15>%WZ>e0x`IiHfr|%f"
    "8w(c`7Xykl5ci;30|X5~s~8-Bbp6$?&ChJ1)+Bg-e8Xi8)X$n)QBssB#397S#lpZK;D~H9JBnc-gAn-dR=I2d&fYFkLjeE)"
)
