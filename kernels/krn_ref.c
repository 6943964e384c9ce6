/* SPDX-License-Identifier: MIT */
#include "kernels/krn_ref.h"

#include <math.h>
#include <stdlib.h>

static void *need(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p)
        abort();
    return p;
}

void krn_ref_matmul(const struct krn_mat *m, const float *x, uint32_t tokens, float *y)
{
    uint64_t row_bytes = 0;
    if (krn_row_bytes(m->type, m->cols, &row_bytes) != 0)
        abort();
    float *w = need(m->cols * sizeof *w);
    for (uint32_t r = 0; r < m->rows; r++) {
        krn_dequant_row(m->type, (const char *)m->data + r * row_bytes, w, m->cols);
        for (uint32_t t = 0; t < tokens; t++) {
            double sum = 0;
            for (uint32_t k = 0; k < m->cols; k++)
                sum += (double)x[(size_t)t * m->cols + k] * w[k];
            y[(size_t)t * m->rows + r] = (float)sum;
        }
    }
    free(w);
}

void krn_ref_rmsnorm(const float *x, const float *weight, float eps, uint32_t tokens, uint32_t dim, float *y)
{
    for (uint32_t t = 0; t < tokens; t++, x += dim, y += dim) {
        double sum = 0;
        for (uint32_t i = 0; i < dim; i++)
            sum += (double)x[i] * x[i];
        double r = 1.0 / sqrt(sum / dim + (double)eps);
        for (uint32_t i = 0; i < dim; i++)
            y[i] = (float)(x[i] * r * weight[i]);
    }
}

void krn_ref_head_norm_rope(float *x, const float *weight, float eps, const uint32_t *positions, float base,
                            uint32_t tokens, uint32_t heads, uint32_t head_dim)
{
    uint32_t half = head_dim / 2;
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t h = 0; h < heads; h++, x += head_dim) {
            if (weight)
                krn_ref_rmsnorm(x, weight, eps, 1, head_dim, x);
            for (uint32_t i = 0; positions && i < half; i++) {
                double angle = positions[t] * pow((double)base, -2.0 * i / head_dim);
                double a = x[i], b = x[half + i];
                x[i] = (float)(a * cos(angle) - b * sin(angle));
                x[half + i] = (float)(b * cos(angle) + a * sin(angle));
            }
        }
}

void krn_ref_attention(const float *k, const float *v, uint32_t kv_heads, uint32_t head_dim, uint32_t pos0,
                       uint32_t tokens, uint32_t heads, const float *q, float *y)
{
    size_t stride = (size_t)kv_heads * head_dim;
    double *s = need((pos0 + tokens) * sizeof *s), *sum = need(head_dim * sizeof *sum);
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t h = 0; h < heads; h++) {
            const float *qh = q + ((size_t)t * heads + h) * head_dim;
            size_t kv_head = h / (heads / kv_heads), keys = pos0 + t + 1;
            double max = -INFINITY, total = 0;
            for (size_t j = 0; j < keys; j++) {
                s[j] = 0;
                for (uint32_t d = 0; d < head_dim; d++)
                    s[j] += (double)qh[d] * k[j * stride + kv_head * head_dim + d];
                s[j] /= sqrt(head_dim);
                max = fmax(max, s[j]);
            }
            for (uint32_t d = 0; d < head_dim; d++)
                sum[d] = 0;
            for (size_t j = 0; j < keys; j++) {
                double p = exp(s[j] - max);
                total += p;
                for (uint32_t d = 0; d < head_dim; d++)
                    sum[d] += p * v[j * stride + kv_head * head_dim + d];
            }
            for (uint32_t d = 0; d < head_dim; d++)
                y[((size_t)t * heads + h) * head_dim + d] = (float)(sum[d] / total);
        }
    free(s);
    free(sum);
}

void krn_ref_router(const float *logits, uint32_t tokens, uint32_t experts, uint32_t top_k, bool renorm,
                    uint32_t *ret_ids, float *ret_weights)
{
    double *p = need(experts * sizeof *p);
    for (uint32_t t = 0; t < tokens; t++) {
        const float *l = logits + (size_t)t * experts;
        double max = -INFINITY, total = 0, chosen = 0;
        for (uint32_t e = 0; e < experts; e++)
            max = fmax(max, l[e]);
        for (uint32_t e = 0; e < experts; e++)
            total += p[e] = exp(l[e] - max);
        for (uint32_t s = 0; s < top_k; s++) {
            uint32_t best = 0;
            for (uint32_t e = 1; e < experts; e++)
                if (p[e] > p[best])
                    best = e;
            ret_ids[(size_t)t * top_k + s] = best;
            ret_weights[(size_t)t * top_k + s] = (float)(p[best] / total);
            chosen += p[best] / total;
            p[best] = -1;
        }
        for (uint32_t s = 0; renorm && s < top_k; s++)
            ret_weights[(size_t)t * top_k + s] = (float)(ret_weights[(size_t)t * top_k + s] / chosen);
    }
    free(p);
}

void krn_ref_experts(const struct krn_expert_job *jobs, uint32_t n_jobs, const float *x, uint32_t top_k,
                     uint32_t hidden, uint32_t width, float *out)
{
    float *g = need(width * sizeof *g), *u = need(width * sizeof *u);
    for (const struct krn_expert_job *j = jobs; j < jobs + n_jobs; j++)
        for (uint32_t i = 0; i < j->n_slots; i++) {
            const float *xt = x + (size_t)(j->slots[i] / top_k) * hidden;
            krn_ref_matmul(&(struct krn_mat){j->gate, j->gate_type, width, hidden}, xt, 1, g);
            krn_ref_matmul(&(struct krn_mat){j->up, j->up_type, width, hidden}, xt, 1, u);
            for (uint32_t r = 0; r < width; r++)
                g[r] = (float)(g[r] / (1.0 + exp(-(double)g[r])) * u[r]);
            krn_ref_matmul(&(struct krn_mat){j->down, j->down_type, hidden, width}, g, 1,
                           out + (size_t)j->slots[i] * hidden);
        }
    free(g);
    free(u);
}

void krn_ref_combine(const float *out, const float *weights, uint32_t tokens, uint32_t top_k, uint32_t hidden,
                     float *y)
{
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t i = 0; i < hidden; i++) {
            double sum = 0;
            for (uint32_t s = 0; s < top_k; s++) {
                size_t slot = (size_t)t * top_k + s;
                sum += (double)weights[slot] * out[slot * hidden + i];
            }
            y[(size_t)t * hidden + i] = (float)(y[(size_t)t * hidden + i] + sum);
        }
}
