/* The gate of a layer's output, as it is multiplied, for both devices. After elements.h, whose words it
 * has. */

LA_ELEMENT lane activated(lane u, la_activation activation)
{
    return activation == LA_SILU ? silu(u) : activation == LA_SIGMOID_GATE ? sigmoid(u) : u;
}
