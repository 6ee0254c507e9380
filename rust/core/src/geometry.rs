//! Where everything lies in a region: sizes and offsets, computed once and checked.

use crate::error::{Error, Result};
use crate::index::IndexLayout;

/// Bumped whenever the meaning of any byte of a region changes; part of the file's name, so that
/// versions of ecpool with different layouts never attach to each other's regions.
pub const LAYOUT_VERSION: u32 = 2;
/// How many clients can be attached to a region at a time.
pub const MAX_CLIENTS: u16 = 256;
/// How many namespaces a region can hold.
pub const MAX_NAMESPACES: u32 = 64;
/// Counters of one client: one page of its own is more than these need, so that clients never share a cache line.
pub const COUNTERS_PER_CLIENT: usize = 64;
/// Bytes before the index: header page, lock page, client generations.
pub const PREFIX_LEN: u64 = 16384;
/// The default size of a block in bytes.
pub const DEFAULT_BLOCK_SIZE: u64 = 16384;
/// The default size of a segment in bytes.
pub const DEFAULT_SEGMENT_SIZE: u64 = 32 << 30;
/// The least size of a block in bytes.
pub const MIN_BLOCK_SIZE: u64 = 4096;

const PAGE: u64 = 4096;
/// Bytes of a huge page.
pub(crate) const HUGE_PAGE: usize = 2 << 20;
const MAX_BLOCK_SIZE: u64 = 1 << 30;
const MIN_SLOTS: u32 = 64;
const DEFAULT_MAX_SLOTS: u32 = 1 << 20;
const MAX_BLOCKS: u64 = 1 << 31;
const MAX_SLOTS: u32 = 1 << 28;

/// What a caller asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GeometryRequest {
    /// Bytes of data; rounded down to whole blocks.
    pub capacity: u64,
    /// Bytes of a block: a power of two of at least 4 KiB.
    pub block_size: u64,
    /// Bytes of a segment: a power of two of at least 2 MiB and of at least one block.
    pub segment_size: u64,
    /// Entries at the most; by default a quarter of the blocks, at least 64, at most 2^20.
    pub num_slots: Option<u32>,
}

/// Where everything lies. All offsets and lengths are in bytes from the file's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a block.
    pub block_size: u64,
    /// Blocks of data.
    pub num_blocks: u32,
    /// Entries at the most.
    pub num_slots: u32,
    /// Holds at the most.
    pub num_holds: u32,
    /// Bytes of a segment; no extent crosses the border between two.
    pub segment_size: u64,
    /// Where the index begins.
    pub index_offset: u64,
    /// Bytes of the index.
    pub index_len: u64,
    /// Where the counters begin.
    pub counters_offset: u64,
    /// Bytes of the counters.
    pub counters_len: u64,
    /// Where the data begin; a multiple of 2 MiB.
    pub data_offset: u64,
    /// Bytes of data: `num_blocks * block_size`.
    pub data_len: u64,
    /// Bytes of the whole file.
    pub file_len: u64,
}

impl Geometry {
    /// The geometry that `request` leads to.
    pub fn new(request: &GeometryRequest) -> Result<Self> {
        check_block_size(request.block_size)?;
        let num_blocks = request.capacity / request.block_size;
        if num_blocks == 0 {
            return Err(Error::InvalidArgument(format!(
                "capacity is {} bytes, but must be at least one block of {} bytes",
                request.capacity, request.block_size
            )));
        }
        let num_blocks = check_num_blocks(num_blocks)?;
        let num_slots = match request.num_slots {
            Some(slots) => check_num_slots(slots)?,
            None => (num_blocks / 4).clamp(MIN_SLOTS, DEFAULT_MAX_SLOTS),
        };
        Self::from_parts(request.block_size, num_blocks, num_slots, default_holds(num_slots), request.segment_size)
    }

    /// The geometry of given parts, each range-checked: used when a header is read.
    pub fn from_parts(
        block_size: u64,
        num_blocks: u32,
        num_slots: u32,
        num_holds: u32,
        segment_size: u64,
    ) -> Result<Self> {
        check_block_size(block_size)?;
        check_num_blocks(u64::from(num_blocks))?;
        check_num_slots(num_slots)?;
        if num_holds == 0 || num_holds > 2 * MAX_SLOTS {
            return Err(Error::invalid("number of holds", num_holds, "1 to 2^29"));
        }
        if !segment_size.is_power_of_two()
            || segment_size < HUGE_PAGE as u64
            || segment_size < block_size
            || segment_size > 1 << 50
        {
            return Err(Error::invalid(
                "segment_size",
                segment_size,
                "a power of two of at least 2 MiB and at least one block",
            ));
        }
        let index_len = round_up(IndexLayout::new(num_blocks, num_slots, num_holds).total_len() as u64, PAGE);
        let counters_offset = PREFIX_LEN + index_len;
        let counters_len = (u64::from(MAX_CLIENTS) + 1) * PAGE;
        let data_offset = round_up(counters_offset + counters_len, HUGE_PAGE as u64);
        let data_len = u64::from(num_blocks) * block_size;
        Ok(Self {
            block_size,
            num_blocks,
            num_slots,
            num_holds,
            segment_size,
            index_offset: PREFIX_LEN,
            index_len,
            counters_offset,
            counters_len,
            data_offset,
            data_len,
            file_len: data_offset + data_len,
        })
    }

    /// Blocks of a whole segment; the last segment may have fewer.
    pub fn blocks_per_segment(&self) -> u32 {
        u32::try_from(self.segment_size / self.block_size).unwrap_or(u32::MAX)
    }

    /// Blocks that `nbytes` need.
    pub fn blocks_for(&self, nbytes: u64) -> u64 {
        nbytes.div_ceil(self.block_size)
    }
}

/// Holds for `num_slots` entries: each can be written or pinned, and leases come on top.
pub(crate) fn default_holds(num_slots: u32) -> u32 {
    num_slots.saturating_add(1024)
}

fn check_block_size(block_size: u64) -> Result<()> {
    if block_size.is_power_of_two() && (MIN_BLOCK_SIZE..=MAX_BLOCK_SIZE).contains(&block_size) {
        return Ok(());
    }
    Err(Error::invalid("block_size", block_size, "a power of two from 4096 to 2^30 bytes"))
}

fn check_num_blocks(num_blocks: u64) -> Result<u32> {
    match u32::try_from(num_blocks) {
        Ok(n) if n > 0 && num_blocks <= MAX_BLOCKS => Ok(n),
        _ => Err(Error::invalid(
            "number of blocks",
            num_blocks,
            "1 to 2^31; choose a larger block_size for a larger capacity",
        )),
    }
}

fn check_num_slots(num_slots: u32) -> Result<u32> {
    if (1..=MAX_SLOTS).contains(&num_slots) {
        return Ok(num_slots);
    }
    Err(Error::invalid("slots", num_slots, "1 to 2^28"))
}

fn round_up(value: u64, to: u64) -> u64 {
    value.div_ceil(to) * to
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(capacity: u64) -> GeometryRequest {
        GeometryRequest {
            capacity,
            block_size: DEFAULT_BLOCK_SIZE,
            segment_size: DEFAULT_SEGMENT_SIZE,
            num_slots: None,
        }
    }

    #[test]
    fn parts_of_a_geometry_lead_back_to_it() {
        for capacity in [16384, 1 << 20, 1 << 30, 200 << 30] {
            let a = Geometry::new(&request(capacity)).unwrap();
            let b = Geometry::from_parts(a.block_size, a.num_blocks, a.num_slots, a.num_holds, a.segment_size).unwrap();
            assert_eq!(a, b);
            assert_eq!(a.data_offset % HUGE_PAGE as u64, 0);
            assert!(a.index_offset + a.index_len <= a.counters_offset);
            assert!(a.counters_offset + a.counters_len <= a.data_offset);
        }
    }

    #[test]
    fn slots_default_to_a_quarter_of_the_blocks_within_bounds() {
        let slots = |capacity| Geometry::new(&request(capacity)).unwrap().num_slots;
        assert_eq!(slots(16384), 64);
        assert_eq!(slots(16384 * 4000), 1000);
        assert_eq!(slots(200 << 30), 1 << 20);
    }

    #[test]
    fn what_is_out_of_range_is_refused_with_the_value_in_the_message() {
        let bad = |r: GeometryRequest, needle: &str| {
            let message = Geometry::new(&r).unwrap_err().to_string();
            assert!(message.contains(needle), "{message}");
        };
        bad(request(16383), "16383");
        bad(GeometryRequest { block_size: 5000, ..request(1 << 20) }, "5000");
        bad(GeometryRequest { block_size: 2048, ..request(1 << 20) }, "2048");
        bad(GeometryRequest { num_slots: Some(0), ..request(1 << 20) }, "slots is 0");
        bad(GeometryRequest { segment_size: 3 << 20, ..request(1 << 20) }, "segment_size");
        bad(GeometryRequest { block_size: 4096, ..request(u64::MAX) }, "number of blocks");
    }
}
