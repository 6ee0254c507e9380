//! The first pages of a region: what it is, and the words that its clients share.
//!
//! | page | bytes | content |
//! | --- | --- | --- |
//! | 0 | 0 | the header: written once, before the region is taken into use |
//! | 0 | 128 | how many clients have attached so far |
//! | 0 | 192 | the ready word: stored last |
//! | 1 | 0 | the lock's word |
//! | 1 | 64 | the dirty flag |
//! | 1 | 128 | what the lock has seen, four counts |
//! | 2 | 0 | a generation for each client's place |
//! | 3 | | unused |
//!
//! The first 16 bytes mean the same in every layout version.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::geometry::{Geometry, LAYOUT_VERSION, PREFIX_LEN};

const PAGE: usize = 4096;
pub(super) const ATTACHED: usize = 128;
pub(super) const READY: usize = 192;
pub(super) const LOCK_WORD: usize = PAGE;
pub(super) const DIRTY: usize = PAGE + 64;
pub(super) const LOCK_COUNTS: usize = PAGE + 128;
pub(super) const GENERATIONS: usize = 2 * PAGE;
/// The ready word of a complete region; anything else is a region that was never finished.
pub(super) const IS_READY: u32 = 0x0EC9_001D;

const _: () = assert!(PREFIX_LEN as usize == 4 * PAGE);

const MAGIC: [u8; 8] = *b"ecpool\0\x01";
/// Enough of the file to judge it by.
const HEAD: usize = 256;

/// How long a region's files keep their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// Until `expected_clients` clients have attached, or the last one has left before that.
    Private {
        /// How many clients there will be.
        expected_clients: u32,
    },
    /// As long as a client lives; the last to leave removes them.
    Shared,
    /// Until somebody deletes them: what is stored outlives its clients.
    Persistent,
}

impl Lifetime {
    fn code(self) -> u32 {
        match self {
            Lifetime::Private { .. } => 1,
            Lifetime::Shared => 2,
            Lifetime::Persistent => 3,
        }
    }

    fn decode(code: u32, expected_clients: u32) -> Option<Self> {
        match code {
            1 => Some(Lifetime::Private { expected_clients }),
            2 => Some(Lifetime::Shared),
            3 => Some(Lifetime::Persistent),
            _ => None,
        }
    }
}

impl fmt::Display for Lifetime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lifetime::Private { expected_clients } => write!(f, "private to {expected_clients} clients"),
            Lifetime::Shared => write!(f, "shared"),
            Lifetime::Persistent => write!(f, "persistent"),
        }
    }
}

/// The header as it lies in the file, in the machine's byte order: the file never leaves the machine.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    layout: u32,
    lifetime: u32,
    block_size: u64,
    segment_size: u64,
    seed: u64,
    num_blocks: u32,
    num_slots: u32,
    num_holds: u32,
    expected_clients: u32,
    file_len: u64,
    check: [u8; 8],
}

const _: () = assert!(size_of::<Raw>() <= ATTACHED);

impl Raw {
    fn checksum(&self) -> [u8; 8] {
        let bytes = self.as_bytes();
        let digest = blake3::hash(&bytes[..bytes.len() - self.check.len()]);
        let mut check = [0; 8];
        check.copy_from_slice(&digest.as_bytes()[..8]);
        check
    }
}

/// What a region's header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) geometry: Geometry,
    pub(super) lifetime: Lifetime,
    /// Mixed into the hashes that choose a bucket, so that nobody can aim keys at one.
    pub(super) seed: u64,
}

impl Header {
    /// Writes the header; the ready word stays unset.
    pub(super) fn write(&self, file: &File) -> io::Result<()> {
        file.write_all_at(self.encode().as_bytes(), 0)
    }

    fn encode(&self) -> Raw {
        let expected_clients = match self.lifetime {
            Lifetime::Private { expected_clients } => expected_clients,
            Lifetime::Shared | Lifetime::Persistent => 0,
        };
        let mut raw = Raw {
            magic: MAGIC,
            layout: LAYOUT_VERSION,
            lifetime: self.lifetime.code(),
            block_size: self.geometry.block_size,
            segment_size: self.geometry.segment_size,
            seed: self.seed,
            num_blocks: self.geometry.num_blocks,
            num_slots: self.geometry.num_slots,
            num_holds: self.geometry.num_holds,
            expected_clients,
            file_len: self.geometry.file_len,
            check: [0; 8],
        };
        raw.check = raw.checksum();
        raw
    }

    /// Reads and checks the header of a file that nobody is creating at the moment. The inner error says
    /// what is wrong with the file; nothing of it is believed, or mapped, before that is settled.
    pub(super) fn read(file: &File) -> io::Result<Result<Self, String>> {
        let len = file.metadata()?.len();
        let mut head = [0; HEAD];
        let read = read_head(file, &mut head)?;
        Ok(Self::decode(&head[..read], len))
    }

    fn decode(head: &[u8], len: u64) -> Result<Self, String> {
        if head.is_empty() {
            return Err("it is empty".to_owned());
        }
        if head.len() < HEAD {
            return Err(format!("it is only {len} bytes long"));
        }
        let (raw, _) = Raw::read_from_prefix(head).map_err(|_| "it is too short".to_owned())?;
        if raw.magic != MAGIC {
            if head.iter().all(|&byte| byte == 0) {
                return Err("its creation was never finished".to_owned());
            }
            return Err("it does not begin as a region does".to_owned());
        }
        if raw.layout != LAYOUT_VERSION {
            return Err(format!(
                "it has layout version {}, and this version of ecpool uses {LAYOUT_VERSION}",
                raw.layout
            ));
        }
        if raw.checksum() != raw.check {
            return Err("its header is damaged".to_owned());
        }
        let header = Self::from_raw(&raw)?;
        if raw.file_len != header.geometry.file_len || len != raw.file_len {
            return Err(format!("it is {len} bytes long, but its header asks for {}", header.geometry.file_len));
        }
        if head[READY..READY + 4] != IS_READY.to_ne_bytes() {
            return Err("its creation was never finished".to_owned());
        }
        Ok(header)
    }

    fn from_raw(raw: &Raw) -> Result<Self, String> {
        let geometry =
            Geometry::from_parts(raw.block_size, raw.num_blocks, raw.num_slots, raw.num_holds, raw.segment_size)
                .map_err(|e| format!("its header is damaged: {e}"))?;
        let lifetime = Lifetime::decode(raw.lifetime, raw.expected_clients)
            .ok_or_else(|| format!("its header is damaged: unknown lifetime {}", raw.lifetime))?;
        Ok(Self { geometry, lifetime, seed: raw.seed })
    }
}

/// The lifetime that a region of any layout version says it has, or `None` for what is not a region.
pub(super) fn peek_lifetime(file: &File) -> io::Result<Option<Lifetime>> {
    let mut head = [0; HEAD];
    let read = read_head(file, &mut head)?;
    let Ok((raw, _)) = Raw::read_from_prefix(&head[..read]) else { return Ok(None) };
    if raw.magic != MAGIC {
        return Ok(None);
    }
    let expected = if raw.layout == LAYOUT_VERSION { raw.expected_clients } else { 0 };
    Ok(Lifetime::decode(raw.lifetime, expected))
}

fn read_head(file: &File, head: &mut [u8; HEAD]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < HEAD {
        match file.read_at(&mut head[filled..], filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::GeometryRequest;

    fn header() -> Header {
        let request = GeometryRequest { capacity: 1 << 20, block_size: 16384, segment_size: 1 << 30, num_slots: None };
        Header {
            geometry: Geometry::new(&request).unwrap(),
            lifetime: Lifetime::Private { expected_clients: 2 },
            seed: 0x1234_5678_9abc_def0,
        }
    }

    fn head_of(header: &Header) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        let raw = header.encode();
        head[..raw.as_bytes().len()].copy_from_slice(raw.as_bytes());
        head[READY..READY + 4].copy_from_slice(&IS_READY.to_ne_bytes());
        head
    }

    #[test]
    fn what_is_written_is_read() {
        for lifetime in [Lifetime::Private { expected_clients: 7 }, Lifetime::Shared, Lifetime::Persistent] {
            let header = Header { lifetime, ..header() };
            assert_eq!(Header::decode(&head_of(&header), header.geometry.file_len), Ok(header));
        }
    }

    #[test]
    fn no_bit_of_the_header_can_flip_unnoticed() {
        let header = header();
        for bit in 0..size_of::<Raw>() * 8 {
            let mut head = head_of(&header);
            head[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&head, header.geometry.file_len).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn each_way_to_be_wrong_has_its_own_words() {
        let header = header();
        let len = header.geometry.file_len;
        let good = head_of(&header);
        let mut unready = good;
        unready[READY] = 0;
        let mut newer = good;
        newer[8..12].copy_from_slice(&(LAYOUT_VERSION + 1).to_ne_bytes());
        let cases: [(&[u8], u64, &str); 7] = [
            (&[], 0, "empty"),
            (&good[..100], 100, "only 100 bytes"),
            (&[0; HEAD], len, "never finished"),
            (&[0xa5; HEAD], len, "does not begin"),
            (&unready, len, "never finished"),
            (&newer, len, "layout version"),
            (&good, len - 1, "bytes long"),
        ];
        for (head, len, words) in cases {
            let why = Header::decode(head, len).unwrap_err();
            assert!(why.contains(words), "{why:?} does not say {words:?}");
        }
    }
}
