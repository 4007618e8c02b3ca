{% include "partials/attention_wgmma_boxes.cu" -%}
// The largest weight of the tile that set the maximum is 2^-3: those of later tiles may grow to 2.
constexpr float HEADROOM = 3.0f;
static_assert(HEAD % COLUMNS == 0 && KEYS % 16 == 0 && STAGES >= 2, "whole boxes, and room to refill");
static_assert(ONES == (BOXES == 1), "boxes of values are one distance apart, and the ones are elsewhere");
